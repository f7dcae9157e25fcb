// run_pte model.pte input.bin output.bin [calls]: one input and one output, both fp32.
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/extension/threadpool/threadpool_guard.h>
#include <chrono>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

using namespace executorch::extension;

static double milliseconds() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

// Linux and Android. getrusage would say the size of the process that has started this one.
static long peak_kibibytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word && word != "VmHWM:") continue;
  long size = 0;
  status >> size;
  return size;
}

int main(int count, char** words) {
  if (count < 4) return std::cerr << "run_pte model.pte input.bin output.bin [calls]\n", 2;
  int calls = count > 4 ? std::stoi(words[4]) : 1;
  threadpool::NoThreadPoolGuard one_thread;
  double start = milliseconds();
  Module model(words[1]);
  auto meta = model.method_meta("forward");
  if (!meta.ok() || model.load_forward() != executorch::runtime::Error::Ok) return 3;
  double loaded = milliseconds();
  auto sizes = meta->input_tensor_meta(0)->sizes();
  std::vector<float> input(meta->input_tensor_meta(0)->nbytes() / sizeof(float));
  std::ifstream(words[2], std::ios::binary).read((char*)input.data(), input.size() * sizeof(float));
  auto tensor = from_blob(input.data(), {sizes.begin(), sizes.end()});
  if (!model.forward(tensor).ok()) return 4;  // the first call warms up
  double before = milliseconds();
  for (int call = 0; call < calls; call++) (void)model.forward(tensor);
  double each = (milliseconds() - before) / calls;
  auto result = model.forward(tensor);
  auto output = result->at(0).toTensor();
  std::ofstream(words[3], std::ios::binary).write(output.const_data_ptr<char>(), output.nbytes());
  std::cout << loaded - start << " " << each << " " << peak_kibibytes() << "\n";
}
